"""What prices the steps of a scenario: the cost model that it asks for, or the best one that is known for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from windtunnel.scenarios.engine import Hardware
from windtunnel.scenarios.errors import ScenarioUnreadable
from windtunnel.scenarios.ledger import Ledger
from windtunnel.scenarios.profile_match import Here, Provenance, differing, differing_shapes, plain_kv_dtype, remarks
from windtunnel.scenarios.schema import AffineCost, AutoCost, ConstantCost, Cost, ProfileCost
from windtunnel.sim.cost import constant, statement
from windtunnel.sim.cost.bundled import BundledProfile, bundled_profiles, find_bundled, load_bundled
from windtunnel.sim.cost.evidence import CARRIED_OVER, COMPOSED, evidence_of_provenance
from windtunnel.sim.cost.fitted import FittedCost
from windtunnel.sim.cost.profile import load_profile
from windtunnel.sim.cost.roofline import RooflineCost, RooflineFactors
from windtunnel.sim.deployment.model import ModelSpec
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.protocols import CostModel

_TELLS_PROFILES = "windtunnel profiles list"


@dataclass(frozen=True, slots=True)
class ChosenCost:
    """A cost model and how it is to be used."""

    model: CostModel
    profile: str | None = None
    """Name of the bundled profile, or path of the file, that it was read from."""
    is_noisy: bool = False


def make_cost(ledger: Ledger, hardware: Hardware, config: SchedulerConfig) -> ChosenCost:
    """The cost model of the scenario's [cost]; what was chosen by default, and why, becomes a setting and a note.

    ``config`` is what a profile's origin is held against beside the hardware.

    Raises ScenarioError for a profile of another tensor parallelism, for noise or a domain asked of a model that has
    none and for a bundled profile that there is not; ProfileError and ScenarioUnreadable for files.
    """
    spec = ledger.loaded.scenario.cost
    for key, value in spec.model_dump(exclude_none=True).items():
        ledger.note("cost", key, value)
    here = Here(hardware, config, _kv_cache_dtype(ledger), ledger.loaded.scenario.speculative)
    chosen = ledger.attempt("cost", tuple(type(spec).model_fields), lambda: _make(ledger, spec, here))
    _tell_of_stages(ledger, hardware, chosen.model)
    return chosen


def _tell_of_stages(ledger: Ledger, hardware: Hardware, cost: CostModel) -> None:
    if hardware.pipeline_parallel_size > 1 and isinstance(cost, FittedCost | RooflineCost):
        unlike = ", and the stated error does not hold for it" if cost.calibrated else ""
        ledger.warnings.append(
            f"a step of the pipeline is the whole step cut into {hardware.pipeline_parallel_size} equal stages: the "
            f"host's part of it is divided too, and moving activations between stages costs nothing{unlike}"
        )


def _make(ledger: Ledger, spec: Cost, here: Here) -> ChosenCost:
    hardware = here.hardware
    match spec:
        case AutoCost():
            return _auto(ledger, spec, here)
        case ProfileCost():
            return _given_profile(ledger, spec, here)
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


def _auto(ledger: Ledger, spec: AutoCost, here: Here) -> ChosenCost:
    hardware = here.hardware
    case, found = _case(ledger, hardware), _bundled_for(ledger, hardware)
    if found is None:
        reason = f"no bundled profile for {case}{_nearest(here)}"
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
    return _of_profile(ledger, found.load(), found.name, spec, here)


def _bundled_for(ledger: Ledger, hardware: Hardware) -> BundledProfile | None:
    model, gpu = hardware.model, hardware.gpu
    assert model is not None, "read_hardware asks for it"
    assert gpu is not None, "read_hardware asks for it"
    name = _profiled_model(model)
    if name is None:
        return None
    kv_dtype = plain_kv_dtype(_kv_cache_dtype(ledger), model.dtype)
    return find_bundled(name, gpu.name, hardware.tensor_parallel_size, model.dtype, kv_dtype)


def _profiled_model(model: ModelSpec) -> str | None:
    """The model of bundled profiles that has the shapes of this one, whatever a config.json is called."""
    names = dict.fromkeys(each.model for each in bundled_profiles())
    return next((name for name in names if differing_shapes(name, model) == {}), None)


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


def _nearest(here: Here) -> str:
    """What else there is of this model on this card, or of this model at all, and in what it differs."""
    model, gpu, size = here.hardware.model, here.hardware.gpu, here.hardware.tensor_parallel_size
    name = None if model is None else _profiled_model(model)
    of_model = [each for each in bundled_profiles() if each.model == name]
    on_gpu = [each for each in of_model if gpu is not None and each.gpu == gpu.name]
    of_size = [each for each in on_gpu if each.tensor_parallel_size == size]
    if model is not None and of_size:
        unlike = min((_other_types(each, model, here.kv_cache_dtype) for each in of_size), key=lambda each: len(each))
        return f"; there is one for {' and '.join(unlike)}"
    if on_gpu:
        sizes = sorted({each.tensor_parallel_size for each in on_gpu})
        return f"; there is one for tensor_parallel_size {', '.join(map(str, sizes))}"
    gpus = list(dict.fromkeys(each.gpu or each.device for each in of_model))
    return f"; there is one on {', '.join(gpus)}" if gpus else ""


def _other_types(profile: BundledProfile, model: ModelSpec, kv_cache_dtype: str) -> list[str]:
    """Types of a profile that the scenario has not."""
    unlike = [] if profile.dtype == model.dtype else [f"dtype {profile.dtype}"]
    if profile.kv_cache_dtype != plain_kv_dtype(kv_cache_dtype, model.dtype):
        unlike.append(f"kv_cache_dtype {profile.kv_cache_dtype}")
    return unlike


# -- a profile that was named


def _given_profile(ledger: Ledger, spec: ProfileCost, here: Here) -> ChosenCost:
    if spec.path is not None:
        return _of_profile(ledger, _read(ledger, spec.path), spec.path, spec, here)
    assert spec.name is not None, "the schema asks for it"
    return _of_profile(ledger, load_bundled(spec.name), spec.name, spec, here)


def _read(ledger: Ledger, name: str) -> CostModel:
    path = ledger.loaded.path_of("cost", "path", name)
    try:
        return load_profile(path)
    except OSError as error:
        raise ScenarioUnreadable(f"cannot read profile {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ScenarioUnreadable(f"cannot read profile {path}: not UTF-8 text ({error.reason})") from error


def _of_profile(ledger: Ledger, cost: CostModel, name: str, spec: AutoCost | ProfileCost, here: Here) -> ChosenCost:
    """A profile as the scenario wants it used; one that was named is held against what the scenario has."""
    if not isinstance(cost, FittedCost):
        for key in ("noise", "refuse_outside"):
            if getattr(spec, key):
                raise ValueError(
                    f"{key} needs a fitted profile, and {name} is of the kind {cost.name}, which knows neither noise "
                    f"nor domain: leave {key} out"
                )
        return ChosenCost(cost, name)
    if isinstance(spec, ProfileCost):
        cost = _held_against(ledger, cost, name, here)
    if here.hardware.pipeline_parallel_size > 1:
        cost = _without_stated_error(cost, "the profile's steps are not those of a pipeline's stages")
    stated = statement.statement_of(cost.describe())
    assert stated is not None, "a fitted model states where it comes from"
    ledger.notes.append(f"Step times come from the profile {name}: {stated.origin}; error {stated.error}.")
    if spec.noise and evidence_of_provenance(cost.evidence.provenance) == COMPOSED:
        ledger.notes.append(
            f"The noise of {name} is how real steps scatter around fits to them; that the profile as a whole may be "
            "off is not in it."
        )
    if here.config.num_speculative_tokens:
        ledger.notes.append(
            f"The profile {name} knows decodes of one token and prompt chunks: a step that verifies drafts is priced "
            "as a step of short prompt chunks, which makes it too long, and the stated error does not cover it."
        )
    if spec.refuse_outside:
        cost = FittedCost(cost.parameters, cost.evidence, refuse_outside=True)
    return ChosenCost(cost, name, bool(spec.noise))


def _held_against(ledger: Ledger, cost: FittedCost, name: str, here: Here) -> FittedCost:
    """Warn of a profile of something else; refuse one of another tensor parallelism, which is never meant."""
    stated = Provenance(cost.evidence.provenance, name)
    made_for, size = stated.tensor_parallel_size(), here.hardware.tensor_parallel_size
    if made_for is not None and made_for != size:
        raise ledger.blame(
            f"the profile {name} is one of tensor_parallel_size {made_for}, the scenario has {size}: set "
            f"tensor_parallel_size = {made_for} (--tensor-parallel-size {made_for}), or give a profile for {size} "
            f"({_TELLS_PROFILES})",
            "cost",
            *ProfileCost.model_fields,
        )
    if others := list(remarks(stated, here)):
        ledger.notes.append(f"The profile {name} was made with {'; '.join(others)}.")
    facts = list(differing(stated, here))
    if not facts:
        return cost
    ledger.warnings.append(
        f"the profile {name} was made for something else, so that its step times and its stated error do not hold "
        f"here: {'; '.join(facts)}"
    )
    return _without_stated_error(cost, "the profile was made for something else")


def _without_stated_error(cost: FittedCost, why: str) -> FittedCost:
    """The same prices, of which no output says that they were measured here, or an error that would not hold."""
    provenance = {**cost.evidence.provenance, "stated_error": {"rests_on": why}, CARRIED_OVER: why}
    return FittedCost(cost.parameters, replace(cost.evidence, provenance=provenance))
